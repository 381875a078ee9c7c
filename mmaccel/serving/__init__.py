"""The HTTP server `mmaccel serve`: OpenAI's image and speech calls over continuous batching. `app`
answers requests, `server` runs it, `engine` decodes waiting rows, `routes` has the modalities.
"""
