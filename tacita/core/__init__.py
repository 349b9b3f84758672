"""Values everybody uses: types, settings, named draws, files, errors."""
