"""What a plan is asked for: settings, the mesh, and what the names in them mean."""
