"""What sums over ranks take, by algorithm and size, captured and eager; and the thresholds that follow."""
