"""The native library, and its operations on arrays of keys and rows."""
