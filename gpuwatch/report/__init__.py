"""What a person reads of a run: the JSON document, the terminal, the HTML page, the lines at its end."""
