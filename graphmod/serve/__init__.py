"""An HTTP server over a decode engine, which answers as OpenAI's API does. Needs the extra `serve`."""
