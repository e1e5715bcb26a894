-- Close the window of a digest, so that later notices go to the next one, and return all that the box holds.
--
-- KEYS  box, seen
-- ARGV  window in ms, how long no notice may have come, how much later than its window a digest may be, shortest time
--       between two
-- returns {time in us, ms to wait as more notices are coming, the fields of the box and their values}
-- keeps: repeated, it returns the same notices for the window until they are removed. A window is open while it waits.
local now = now_us()
local now_ms, window = math.floor(now / 1000), tonumber(ARGV[1])
if redis.call('HGET', KEYS[1], 'due') == ARGV[1] then
  local newest = tonumber(redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2] or '0')
  local wait = math.min(newest + tonumber(ARGV[2]), window + tonumber(ARGV[3])) - now_ms
  -- A window that has waited a minute for the message before it has gathered enough.
  local fresh = window > tonumber(redis.call('HGET', KEYS[1], 'last') or '0') + tonumber(ARGV[4])
  if fresh and wait > 0 then return {now, wait, {}} end
  redis.call('HSET', KEYS[1], 'last', string.format('%.0f', now_ms))
  redis.call('HDEL', KEYS[1], 'due')
end
return {now, 0, redis.call('HGETALL', KEYS[1])}
