"""Attention paths: dense (SGLang's own), collect (verify with scores), sparse (drafts)."""
