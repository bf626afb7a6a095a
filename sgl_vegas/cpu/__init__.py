"""What lets SGLang serve on a machine without a GPU."""
