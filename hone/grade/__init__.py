"""Is this answer correct: parsing, mathematics, killable workers."""
