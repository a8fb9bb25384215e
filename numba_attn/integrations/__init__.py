"""Adapters for other libraries; each is imported by who uses that library, never by the package."""
