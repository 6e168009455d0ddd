"""What ``polyshard plan`` says, beside what happens."""
