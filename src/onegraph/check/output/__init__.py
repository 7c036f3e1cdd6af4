"""A report as text, JSON, SARIF or one HTML page."""
