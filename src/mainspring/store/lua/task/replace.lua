-- Put a task in the place of another: replace, reschedule, or reuse of an id whose task finished long ago.
--
-- KEYS  n, slices, ids, s of the new place, s f x of the old
-- ARGV  mode, idh, expected index value ('' = none), new name, new score, new address prefix, new entry,
--       old name, old g, old index
--   mode 'move': the old task must be pending; it is tombstoned and points to the new place
--   mode 'new': the old task is finished or in flight and stays as it is
-- returns {status, incarnation, index}; status: ok | changed (the index holds another value, returned second)
--   | cancelled | too late | gone
-- keeps: one step, so there is never a moment with no task or with two.
local n, slices, ids, new_s = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local mode, idh, expected = ARGV[1], ARGV[2], ARGV[3]
local current = redis.call('HGET', ids, idh) or ''
if current ~= expected then return {'changed', current} end
local old, old_index, first = nil, tonumber(ARGV[10]), nil
if mode == 'move' then
  if not same_incarnation(slices, ARGV[8], tonumber(ARGV[9])) then return {'gone'} end
  old = redis.call('LINDEX', KEYS[5], old_index)
  if not old then return {'gone'} end
  if #old == 4 then return {old == string.sub(idh, 1, 4) and 'cancelled' or 'gone'} end
  if string.sub(old, 6, 21) ~= idh then return {'gone'} end
  if math.floor(string.byte(old, 5) / 8) % 2 == 1 then return {#old == 21 and 'cancelled' or 'gone'} end
  first = first_copy(KEYS[5], old, old_index)
  if redis.call('GETBIT', KEYS[6], first) == 1 then return {'too late'} end
  if is_resent(old) and redis.call('EXISTS', KEYS[6]) == 1 and mark_of(KEYS[5], idh) then return {'gone'} end
end
local incarnation = open_slice(slices, ARGV[4], ARGV[5])
local index = redis.call('RPUSH', new_s, ARGV[7]) - 1
local address = ARGV[6] .. struct.pack('>I3I4', incarnation, index)
-- The entry was written with the INDEXED flag, so its place is stored: handles to the old place find it by its id.
redis.call('HSET', ids, idh, address)
redis.call('HINCRBY', n, 'accepted', 1)
if mode == 'move' then
  bury(KEYS[5], old, old_index, first, 24, address)  -- TOMBSTONE and FORWARD
  redis.call('SETBIT', KEYS[7], first, 1)
  redis.call('HINCRBY', n, 'replaced', 1)
end
return {'ok', incarnation, index}
