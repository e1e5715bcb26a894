-- Commit outcomes other than plain success for one partition: retries, dead letters, repeats that were dropped.
--
-- KEYS  fence, n, slices, dead, dead:t, held, ids; s, d of each touched slice; s of each place for retries
-- ARGV  token, seq, finished, replaced, touched, places, retries, deaths, holds, then
--         per touched slice: name, g, m (-1 = proven before), header at m, d offset (-1 = all of d), d bytes
--         per place: name, score
--         per retry: place (counted from 1), idh, address prefix, entry, address it comes from
--         per death: idh, record, time in ms
--         per hold: lane, idh of the head it waits for ('' = free again)
-- returns {time in us, status}; status: ok | fenced | rolledback | stale
-- keeps: a task leaves its slice only together with its retry or its dead letter.
local now = now_us()
local fence, n, slices, dead, dead_times, held, ids = unpack(KEYS, 1, 7)
local finished, replaced = tonumber(ARGV[3]), tonumber(ARGV[4])
local touched, places, retries = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local deaths, holds = tonumber(ARGV[8]), tonumber(ARGV[9])
local new_fence = ARGV[1] .. ':' .. ARGV[2]
local status = judge(redis.call('GET', fence), new_fence)
if status == 'repeated' then return {now, 'ok'} end
if status then return {now, status} end
local a = 9
for i = 0, touched - 1 do
  local at = a + i * 6
  if not proven(slices, KEYS[8 + i * 2], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]) then
    return {now, 'stale'}
  end
end
local first_touched = a
a = a + touched * 6
local place_key, first_place = 7 + touched * 2, a
local incarnation = {}
a = a + places * 2
local superseded, retried = {}, retries
for _ = 1, retries do
  local place, idh = tonumber(ARGV[a + 1]), ARGV[a + 2]
  local known = redis.call('HGET', ids, idh)
  if known and known ~= ARGV[a + 5] then
    -- Its id was given to another task while it was under way: that one stands for both.
    superseded[idh] = true
    retried, replaced = retried - 1, replaced + 1
  else
    if not incarnation[place] then
      -- Not before: a slice that is opened for a retry which is not written would stand there empty.
      local at = first_place + place * 2
      incarnation[place] = open_slice(slices, ARGV[at - 1], ARGV[at])
    end
    local length = redis.call('RPUSH', KEYS[place_key + place], ARGV[a + 4])
    redis.call('HSET', ids, idh, ARGV[a + 3] .. struct.pack('>I3I4', incarnation[place], length - 1))
  end
  a = a + 5
end
for _ = 1, deaths do
  redis.call('HSET', dead, ARGV[a + 1], ARGV[a + 2])
  redis.call('ZADD', dead_times, ARGV[a + 3], ARGV[a + 1])
  a = a + 3
end
-- Lanes that are held first, then those that are free: a hash that is emptied in between is gone, and while its slot is
-- on its way to another server it cannot be made again here.
local waits = {}
for _ = 1, holds do
  waits[ARGV[a + 1]] = superseded[ARGV[a + 2]] and '' or ARGV[a + 2]
  a = a + 2
end
for lane, idh in pairs(waits) do
  if idh ~= '' then redis.call('HSET', held, lane, idh) end
end
for lane, idh in pairs(waits) do
  if idh == '' then redis.call('HDEL', held, lane) end
end
if finished > 0 then redis.call('HINCRBY', n, 'done', finished) end
if replaced > 0 then redis.call('HINCRBY', n, 'replaced', replaced) end
if retried > 0 then redis.call('HINCRBY', n, 'retried', retried) end
if deaths > 0 then redis.call('HINCRBY', n, 'dead', deaths) end
for i = 0, touched - 1 do
  local at = first_touched + i * 6
  if ARGV[at + 5] == '-1' then redis.call('SET', KEYS[9 + i * 2], ARGV[at + 6])
  else redis.call('SETRANGE', KEYS[9 + i * 2], ARGV[at + 5], ARGV[at + 6]) end
end
redis.call('SET', fence, new_fence)
return {now, 'ok'}
