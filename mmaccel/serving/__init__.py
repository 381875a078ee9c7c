"""The HTTP server `mmaccel serve`: OpenAI's image and speech calls over continuous batching.

`app` answers requests and `server` runs it; `engine` lets rows wait, decodes them together and
delivers them. `images` and `speech` are the two modalities: what a request may say, how it is
decoded, and what its answer is.
"""
