"""`onegraph serve`: OpenAI's HTTP interface over one engine, requests joining and leaving while it runs."""
