"""`tidemill bench`: load on an OpenAI-compatible endpoint, and what its clients would have seen."""
