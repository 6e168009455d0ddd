"""Where values, codes and scales lie, and which parameters are left out."""
