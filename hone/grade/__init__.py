"""Is this answer right: parsing, mathematics, workers that can be killed."""
