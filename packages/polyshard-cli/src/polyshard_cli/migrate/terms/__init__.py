"""What every term of the other engines corresponds to: the tables of the tool and of the docs."""
