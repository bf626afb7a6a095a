"""VEGAS: lossless self-speculative decoding for SGLang, loaded by SGLang as a plug-in."""

__version__ = "0.1.0"
