"""What runs remotely: shard actors, engines, warmups, layout signatures."""
