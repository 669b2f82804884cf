"""DeepSeek-V4.1-Flash, executable: the implementation behind the book."""
