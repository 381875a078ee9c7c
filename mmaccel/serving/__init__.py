"""The HTTP server `mmaccel serve`: OpenAI's image and speech calls over continuous batching.

A request passes through these modules: `server` (uvicorn, signals), `app` (routes), `bodies`
(what a body may say), `jobs` (the bounded queue), `engine` (the thread that decodes), and `images`
or `speech` (the model).
"""
