"""Reports: tables and pictures of what runs and measurements wrote."""
