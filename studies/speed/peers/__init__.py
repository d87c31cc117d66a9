"""The same job on other systems: FederatedScope and Flower, each in an environment of its own; ``case`` compares.

The scripts ``*_job.py`` run in the peers' environments and import nothing of ours but ``fedjob`` beside them.
"""
