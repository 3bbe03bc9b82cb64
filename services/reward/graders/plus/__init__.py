"""What answers mean to the rule `deepscaler_plus`, by kind: numbers with units, lists, intervals, and so on."""
