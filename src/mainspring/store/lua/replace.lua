-- Put a task in the place of another: replace, reschedule, or reuse of an id whose task is long finished.
--
-- KEYS  n, slices, ids bucket, s of the new place, s f x of the old
-- ARGV  mode, idh, expected index value ('' = none), new name, new score, new address prefix, new entry,
--       old name, old g, old index
--   mode 'move': the old task must be pending; it is tombstoned and points to the new place
--   mode 'anew': the old task is finished or under way and stays as it is
-- returns {status, incarnation, index}; status: ok | changed (the index holds another value, returned second)
--   | cancelled | too late | gone
-- keeps: one step, so there is never a moment with no task or with two.
local n, slices, bucket, new_s = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local mode, idh, expected = ARGV[1], ARGV[2], ARGV[3]
local current = redis.call('HGET', bucket, idh) or ''
if current ~= expected then return {'changed', current} end
if mode == 'move' then
  local old_index = tonumber(ARGV[10])
  if not same_incarnation(slices, ARGV[8], tonumber(ARGV[9])) then return {'gone'} end
  local old = redis.call('LINDEX', KEYS[5], old_index)
  if redis.call('GETBIT', KEYS[7], old_index) == 1 then return {'cancelled'} end
  if not old or string.sub(old, 6, 21) ~= idh then return {'gone'} end
  if redis.call('GETBIT', KEYS[6], old_index) == 1 then return {'too late'} end
end
local incarnation = open_slice(slices, ARGV[4], ARGV[5])
local index = redis.call('RPUSH', new_s, ARGV[7]) - 1
local address = ARGV[6] .. struct.pack('>I3I4', incarnation, index)
-- The entry was written with the INDEXED flag, so its place is kept: handles to the old place find it by its id.
redis.call('HSET', bucket, idh, address)
redis.call('HINCRBY', n, 'accepted', 1)
if mode == 'move' then
  local old_index = tonumber(ARGV[10])
  local old = redis.call('LINDEX', KEYS[5], old_index)
  local flags = string.char(24)  -- TOMB and FORWARD
  redis.call('LSET', KEYS[5], old_index, string.sub(old, 1, 4) .. flags .. idh .. address)
  redis.call('SETBIT', KEYS[7], old_index, 1)
  redis.call('HINCRBY', n, 'replaced', 1)
end
return {'ok', incarnation, index}
