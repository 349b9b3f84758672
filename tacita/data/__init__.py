"""Reading tables of interactions, and splitting them into what is learned and what is asked."""
