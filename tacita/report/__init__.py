"""Pages of results: what a run folder tells (data), drawings (charts), and one HTML file that shows both (pages)."""
