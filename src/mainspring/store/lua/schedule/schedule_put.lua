-- Write a schedule: add, edit, pause, resume, roll back, remove, or schedule its next occurrence again.
--
-- KEYS  n, slices, ids, sched, next, revisions; s of the new place; s, f, x of the old one; if runs are written, those of
--       lib/_runs.lua
-- ARGV  name
--       the state the caller has read: 'live' | 'gone', generation (of the definition, or of the last revision; 0 = none),
--         the first 12 bytes of its next value ('' = none)
--       the definition to write ('' = remove, '=' = leave as it is), revisions to keep, ms to keep those of a removed one
--       the planned occurrence to cancel: idh ('' = none), its index value ('' = none), slice, g, index
--       the new next value ('' = none), idh of the new occurrence ('' = none), slice, score, address prefix, entry
--       runs (see lib/_runs.lua, '' = none): planned times that did not run
-- returns {status}: ok | changed (the schedule was written by another caller, or its chain advanced) | moved (the
--   occurrence to cancel is elsewhere by now) | taken (the new occurrence's id is in use: it ran already)
-- keeps: a schedule has one planned occurrence, of its own generation; the old one never begins after this.
local n, slices, ids, sched, next_key, revisions = unpack(KEYS, 1, 6)
local name, seen, generation, claim, definition = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local old_idh, old_at, old_slice, old_g, old_index = unpack(ARGV, 8, 12)
local value, idh, slice, score, prefix, row = unpack(ARGV, 13, 18)

local function generation_of(raw) return raw and struct.unpack('>I4', raw) or 0 end

local current = redis.call('HGET', sched, name)
local known = current or redis.call('LINDEX', revisions, 0)
if (current and 'live' or 'gone') ~= seen or generation_of(known) ~= generation then return {'changed'} end
if string.sub(redis.call('HGET', next_key, name) or '', 1, 12) ~= claim then return {'changed'} end
local planned
if old_idh ~= '' then
  if (redis.call('HGET', ids, old_idh) or '') ~= old_at then return {'moved'} end
  if old_at ~= '' and same_incarnation(slices, old_slice, tonumber(old_g)) then
    planned = redis.call('LINDEX', KEYS[8], old_index)
    if planned and (#planned < 22 or string.sub(planned, 6, 21) ~= old_idh) then planned = nil end
    if planned and redis.call('GETBIT', KEYS[9], old_index) == 1 then planned = nil end
    if planned and redis.call('GETBIT', KEYS[10], old_index) == 1 then planned = nil end
  end
end
if idh ~= '' and not (planned and idh == old_idh) and redis.call('HEXISTS', ids, idh) == 1 then return {'taken'} end

if planned then
  redis.call('LSET', KEYS[8], old_index, string.sub(old_idh, 1, 4))
  redis.call('SETBIT', KEYS[10], old_index, 1)
  redis.call('HINCRBY', n, 'cancelled', 1)
  if idh ~= old_idh then redis.call('HDEL', ids, old_idh) end
end
if idh ~= '' then
  local incarnation = open_slice(slices, slice, score)
  local index = redis.call('RPUSH', KEYS[7], row) - 1
  redis.call('HSET', ids, idh, prefix .. struct.pack('>I3I4', incarnation, index))
  redis.call('HINCRBY', n, 'accepted', 1)
end
if definition ~= '=' then
  if current then
    redis.call('LPUSH', revisions, current)
    redis.call('LTRIM', revisions, 0, tonumber(ARGV[6]) - 1)
  end
  if definition == '' then
    redis.call('HDEL', sched, name)
    redis.call('PEXPIRE', revisions, ARGV[7])
  else
    redis.call('HSET', sched, name, definition)
    if seen == 'gone' and known then redis.call('PERSIST', revisions) end
  end
end
if value == '' then redis.call('HDEL', next_key, name) else redis.call('HSET', next_key, name, value) end
write_runs(now_us(), ARGV[19])
return {'ok'}
