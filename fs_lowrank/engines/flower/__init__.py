"""The engine on Flower: its server drives Flower's grid, and every client is a node of it.

``run.py`` starts Flower's simulation on this machine (``--engine flower``). ``app.py`` has the two halves of a Flower
app, which ``flwr run`` starts on a federation of SuperNodes; ``project.py`` writes the app's folder.
"""
