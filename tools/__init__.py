"""What developers of onegraph run and its users do not; no part of the wheel."""
