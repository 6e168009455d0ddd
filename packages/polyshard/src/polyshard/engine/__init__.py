"""When groups are gathered, freed and reduced: units, hooks and the root they share."""
