"""Mathematical expressions: read from LaTeX or plain text, and compared by their values, within bounds."""
