-- End runs of one partition: each leaves its stream together with its result, its retry, its dead letter or its ack.
--
-- KEYS  n, slices, ids, queued, acks, dead, dead:t; the stream of each queue; s of each place for retries; x of the slice
--       of each task of a lane and each that was cancelled; a key for each result; s of the slice of each retry; if runs
--       are written, those of lib/_runs.lua
-- ARGV  queues, places, ends, retries, deaths, of lanes, cancelled, results, runs (see lib/_runs.lua, '' = none), then
--         per queue: how many of the ends
--         for all ends, queue by queue: idhs; then their places in `queued` with the claims; then their stream ids
--         per place: name, score
--         per retry: end, place, address prefix, entry, 1 if handles may know its old place (ends, places counted from 1)
--         per death: end, record, time in ms
--         per task of a lane: end, outcome (see below)
--         per cancelled one: end
--         per result: end, time to live in ms, bytes
-- returns nothing if all have ended. Otherwise nothing was written, for any of them: the ends whose claim is no longer
--   valid, and negative those that are to be retried, but were cancelled: the runs as they are packed must be those that end
-- keeps: only the claim ends a run, and only once. A task of a lane is settled by the owner of its partition, which finds
--   the outcome in `acks` under its address: idh, then 'd' done, 'r' retry, 'x' dead or 'c' cancelled, and its details.
local n, slices, ids, queued, acks, dead, dead_times = unpack(KEYS, 1, 7)
local streams, places, ends = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local retries, deaths, lanes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local cancels, results = tonumber(ARGV[7]), tonumber(ARGV[8])
local idh_at = 9 + streams
local claim_at, id_at = idh_at + ends, idh_at + ends * 2
local known = redis.call('HMGET', queued, unpack(ARGV, idh_at + 1, idh_at + ends))
local marked, out = {}, {}
for i = 1, ends do
  local claim = ARGV[claim_at + i]
  if known[i] ~= claim then
    if known[i] == claim .. '!' then marked[i] = true
    else out[#out + 1] = i end
  end
end
local a, place_key, x_key = id_at + ends, 7 + streams, 7 + streams + places
local first_place, incarnation = a, {}
a = a + places * 2
if next(marked) then
  local first_lane = a + retries * 5 + deaths * 3
  for k = 0, retries - 1 do
    local i = tonumber(ARGV[a + k * 5 + 1])
    if marked[i] then out[#out + 1] = -i end
  end
  for k = 0, lanes - 1 do
    local i = tonumber(ARGV[first_lane + k * 2 + 1])
    if marked[i] and string.sub(ARGV[first_lane + k * 2 + 2], 1, 1) == 'r' then out[#out + 1] = -i end
  end
end
if #out > 0 then return out end
local done, retried, replaced, died = ends, 0, 0, 0
local called_off, acked = {}, 0
local function call_off_later(i, x_key)
  called_off[#called_off + 1] = {ARGV[idh_at + i], string.sub(ARGV[claim_at + i], 1, 14), KEYS[x_key]}
end
local s_key = x_key + lanes + cancels + results

-- A handle may know the place the task comes from, and the slice may still exist: a mark leads from there to the new place.
-- Otherwise a task that is cancelled in its new place would look done in the old one.
local function leave_mark(s, from, idh, address)
  local name, g, index = place_of(from)
  local row = same_incarnation(slices, name, g) and redis.call('LINDEX', s, index)
  if row and #row > 21 and string.sub(row, 6, 21) == idh then bury(s, row, index, index, 24, address) end
end

for k = 1, retries do
  local i, place = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local idh, from = ARGV[idh_at + i], string.sub(ARGV[claim_at + i], 1, 14)
  local index = redis.call('HGET', ids, idh)
  if index and index ~= from then
    -- Its id was given to another task while it was in flight: the newer task represents both.
    replaced = replaced + 1
  else
    local at = first_place + place * 2
    incarnation[place] = incarnation[place] or open_slice(slices, ARGV[at - 1], ARGV[at])
    local length = redis.call('RPUSH', KEYS[place_key + place], ARGV[a + 4])
    local address = ARGV[a + 3] .. struct.pack('>I3I4', incarnation[place], length - 1)
    redis.call('HSET', ids, idh, address)
    if ARGV[a + 5] == '1' then leave_mark(KEYS[s_key + k], from, idh, address) end
    retried = retried + 1
  end
  a = a + 5
end
for _ = 1, deaths do
  local i = tonumber(ARGV[a + 1])
  redis.call('HSET', dead, ARGV[idh_at + i], ARGV[a + 2])
  redis.call('ZADD', dead_times, ARGV[a + 3], ARGV[idh_at + i])
  died = died + 1
  a = a + 3
end
for _ = 1, lanes do
  local i, outcome = tonumber(ARGV[a + 1]), ARGV[a + 2]
  x_key = x_key + 1
  if outcome == 'c' then call_off_later(i, x_key) end
  redis.call('HSET', acks, string.sub(ARGV[claim_at + i], 1, 14), ARGV[idh_at + i] .. outcome)
  acked = acked + 1
  a = a + 2
end
for _ = 1, cancels do
  x_key = x_key + 1
  call_off_later(tonumber(ARGV[a + 1]), x_key)
  a = a + 1
end
for r = 1, results do
  redis.call('SET', KEYS[x_key + r], ARGV[a + 3], 'PX', ARGV[a + 2])
  a = a + 3
end
call_off(slices, ids, called_off)
local cancelled = #called_off
done = done - retries - deaths - lanes - cancels
if ends > acked then redis.call('HINCRBY', n, 'queued', acked - ends) end
if acked > 0 then redis.call('HINCRBY', n, 'aside', -acked) end
for name, count in pairs({done = done, retried = retried, replaced = replaced, dead = died, cancelled = cancelled}) do
  if count > 0 then redis.call('HINCRBY', n, name, count) end
end
local i = 0
for q = 1, streams do
  local count = tonumber(ARGV[9 + q])
  redis.call('XACK', KEYS[7 + q], 'w', unpack(ARGV, id_at + i + 1, id_at + i + count))
  redis.call('XDEL', KEYS[7 + q], unpack(ARGV, id_at + i + 1, id_at + i + count))
  i = i + count
end
redis.call('HDEL', queued, unpack(ARGV, idh_at + 1, idh_at + ends))
write_runs(now_us(), ARGV[9])
return out
