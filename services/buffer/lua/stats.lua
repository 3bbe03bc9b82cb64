-- ARGV: the names of the states. Returns counts of one instant: run, train, eval, reasons for dropped, failed and stale, discarded
-- tokens, leases.
local train, eval = {}, {}
for at = 1, #ARGV do train[at], eval[at] = size('train', ARGV[at]), size('eval', ARGV[at]) end
return {redis.call('HGETALL', RUN), train, eval, redis.call('HGETALL', P .. 'train:dropped_reasons'),
  redis.call('HGETALL', P .. 'train:failed_reasons'), redis.call('HGETALL', P .. 'train:stale_reasons'),
  redis.call('HGETALL', P .. 'discarded'), redis.call('ZCARD', LEASES)}
