"""Keys in a few bits: enough to say which of them a query would look at."""
