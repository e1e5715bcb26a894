-- Replay dead letters of one partition: each becomes a task again in the same step that removes its dead letter.
--
-- KEYS  n, slices, ids, dead, dead:t, queued; s of each new place; s, d, x of each place the index led to, or where they died
-- ARGV  places, old places, dead letters, then
--         per place: name, score, address prefix
--         per old place: name
--         per dead letter: idh, time of its death in ms, place (counted from 1), entry,
--           address the index held ('' = none), its old place (counted from 1, 0 = none), address that handles may know it by
--           ('' = none)
-- returns {status, index | address the index holds} per dead letter
--   status: ok | gone (it does not exist, or is of a later death) | changed (the index holds another address)
--     | live (a task with this id is pending or in flight, also in a queue)
-- keeps: one step, so there is never a moment without dead letter and task, or with both. A repeated call finds the dead
--   letter gone. A replayed task counts as accepted again: its death stays counted, and no counter is reduced.
local n, slices, ids, dead, dead_times, queued = unpack(KEYS, 1, 6)
local places, olds, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local first_old_key, first_old, a = 6 + places, 3 + places * 3, 3 + places * 3 + olds

local function is_live(idh, address, old)
  local r, index = struct.unpack('>I3I4', string.sub(address, 8))
  local at = first_old_key + (old - 1) * 3
  local score = redis.call('ZSCORE', slices, ARGV[first_old + old])
  if not score or (tonumber(score) - math.floor(tonumber(score))) * 1048576 ~= r then return false end
  local row = redis.call('LINDEX', KEYS[at + 1], index)
  if not row or string.sub(row, 6, 21) ~= idh or math.floor(string.byte(row, 5) / 8) % 2 == 1 then return false end
  return redis.call('GETBIT', KEYS[at + 2], index) == 0 and redis.call('GETBIT', KEYS[at + 3], index) == 0
end

local function status_of(idh, died, expected, old)
  local time = redis.call('ZSCORE', dead_times, idh)
  local current = redis.call('HGET', ids, idh) or ''
  if not time or tonumber(time) ~= died or redis.call('HEXISTS', dead, idh) == 0 then return 'gone', current end
  if current ~= expected then return 'changed', current end
  -- A task that was handed off is done in its slice, but not over.
  if redis.call('HEXISTS', queued, idh) == 1 then return 'live', current end
  if expected ~= '' and is_live(idh, expected, old) then return 'live', current end
  return 'ok', 0
end

-- Leave a mark that leads on from where the task died: otherwise it would look done there after a cancel.
local function leave_mark(idh, from, old, address)
  local name, g, index = place_of(from)
  local s = KEYS[first_old_key + old * 3 - 2]
  local row = same_incarnation(slices, name, g) and redis.call('LINDEX', s, index)
  if row and #row >= 21 and string.sub(row, 6, 21) == idh then bury(s, row, index, index, 24, address) end
end

-- Read everything first: a hash that becomes empty is gone, and cannot be read while its slot is moving to another
-- server.
local out, incarnation = {}, {}
for i = 1, count do
  local at = a + (i - 1) * 7
  out[i * 2 - 1], out[i * 2] = status_of(ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 5], tonumber(ARGV[at + 6]))
end
for i = 1, count do
  if out[i * 2 - 1] == 'ok' then
    local at = a + (i - 1) * 7
    local idh, place = ARGV[at + 1], tonumber(ARGV[at + 3])
    local where = 3 + (place - 1) * 3
    -- Not before: a slice that is opened for a task which is not written would remain empty.
    incarnation[place] = incarnation[place] or open_slice(slices, ARGV[where + 1], ARGV[where + 2])
    local index = redis.call('RPUSH', KEYS[6 + place], ARGV[at + 4]) - 1
    local address = ARGV[where + 3] .. struct.pack('>I3I4', incarnation[place], index)
    redis.call('HSET', ids, idh, address)
    if ARGV[at + 7] ~= '' then leave_mark(idh, ARGV[at + 7], tonumber(ARGV[at + 6]), address) end
    redis.call('HINCRBY', n, 'accepted', 1)
    redis.call('HDEL', dead, idh)
    redis.call('ZREM', dead_times, idh)
    out[i * 2] = index
  end
end
return out
