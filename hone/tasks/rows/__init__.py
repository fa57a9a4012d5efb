"""Problems from rows: GSM8K, MATH, any dataset."""
