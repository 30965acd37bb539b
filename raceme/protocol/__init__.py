"""What the parts say to each other: messages, events, the clock of a grid."""
