-- Compare the counters of queued tasks with the places and streams, and set them if requested.
--
-- KEYS  n, queued; the stream of each queue
-- ARGV  1 to set them; then the name of each queue
-- returns {counted as queued, counted as of lanes, places, entries of all streams, 1 if the counters were set}
-- The counters are set only if the tasks are few enough to count within some milliseconds.
local n, queued = KEYS[1], KEYS[2]
local counters = redis.call('HMGET', n, 'queued', 'aside')
local out = {tonumber(counters[1] or 0), tonumber(counters[2] or 0), redis.call('HLEN', queued), 0, 0}
local streams = {}
for q = 3, #KEYS do
  streams[ARGV[q - 1]] = KEYS[q]
  out[4] = out[4] + redis.call('XLEN', KEYS[q])
end
if ARGV[1] ~= '1' or out[3] > 20000 then return out end
local plain, lanes = 0, 0
for _, place in ipairs(redis.call('HVALS', queued)) do
  local id, name = string.match(string.sub(place, 15), '^(%S+) (%S+)')
  local entry = streams[name] and redis.call('XRANGE', streams[name], id, id)[1]
  if entry and in_lane(entry[2][2]) then lanes = lanes + 1 else plain = plain + 1 end
end
redis.call('HSET', n, 'queued', plain, 'aside', lanes)
redis.call('HINCRBY', n, 'repairs', 1)
out[5] = 1
return out
