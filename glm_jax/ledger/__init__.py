"""What a step costs: operations, bytes, floor times of every stage, and who pays; host-only."""
