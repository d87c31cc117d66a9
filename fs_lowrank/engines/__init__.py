"""What runs a method: the embedded engine, and the plug-in for FederatedScope."""
