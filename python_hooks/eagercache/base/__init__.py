"""What every process of ours needs: settings, logs, files, the environment key."""
