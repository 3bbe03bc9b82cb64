-- ARGV: the names of the states. Returns {run hash, train counts, eval counts, dropped reasons, failed reasons}: one instant.
local train, eval = {}, {}
for at = 1, #ARGV do train[at], eval[at] = size('train', ARGV[at]), size('eval', ARGV[at]) end
return {redis.call('HGETALL', RUN), train, eval, redis.call('HGETALL', P .. 'train:dropped_reasons'),
  redis.call('HGETALL', P .. 'train:failed_reasons')}
