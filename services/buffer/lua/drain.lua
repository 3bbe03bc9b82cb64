-- ARGV: worker_id
even_if_full()
redis.call('SADD', DRAINED, ARGV[1])
return 1
