-- Count the tasks of some slices of a partition, all at the same moment.
--
-- KEYS  n, slices; s of each slice; f, d and x of each slice
-- ARGV  count, names of the slices
-- returns {counters, live slices in all, score of each, length of each, {place among f, d, x of all; that bitmap ...}}
--   counters: accepted, queued, done, cancelled, replaced, dead, retried, spilled, repairs
-- Reads no entry: the number of pending tasks follows from the length of a list and its bits. The caller bounds the
-- number of slices.
local count = tonumber(ARGV[1])
local scores, lengths, bitmaps, b = {}, {}, {}, 0
for first = 1, count, 1000 do
  local some = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, first + 1, math.min(first + 1000, count + 1)))
  for i, score in ipairs(some) do scores[first + i - 1] = score end
end
for i = 1, count do lengths[i] = redis.call('LLEN', KEYS[2 + i]) end
local before = 2 + count
for first = 1, count * 3, 3000 do
  local some = redis.call('MGET', unpack(KEYS, before + first, before + math.min(first + 2999, count * 3)))
  for i, bits in ipairs(some) do
    if bits then bitmaps[b + 1], bitmaps[b + 2], b = first + i - 1, bits, b + 2 end
  end
end
local counters = redis.call('HMGET', KEYS[1], 'accepted', 'queued', 'done', 'cancelled', 'replaced', 'dead', 'retried', 'spilled', 'repairs')
return {counters, redis.call('ZCARD', KEYS[2]), scores, lengths, bitmaps}
