"""What operators run: the command line, the doctor, clusters on one machine, commands of replica hosts."""
