-- Repair an entry of the index that does not lead to its task.
--
-- KEYS  slices, ids, s of the slice it names
-- ARGV  idh, address as it was read, name of the slice, its end in ms; without a name the address cannot be read
-- returns 'changed' (another address by now, or no fault), 'removed', or 'moved' (it leads to its task again)
-- keeps: a task is never touched; an entry is removed only while it leads nowhere.
local slices, ids, s = KEYS[1], KEYS[2], KEYS[3]
local idh, address, name = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', ids, idh) ~= address then return 'changed' end
local fault = 'nothing'
local score
if name ~= '' then
  score = redis.call('ZSCORE', slices, name)
  score = score and tonumber(score)
  fault = fault_of(idh, address, s, score, tonumber(ARGV[4]), math.floor(now_us() / 1000))
end
if not fault then return 'changed' end
if fault == 'renewed' then
  local r = struct.pack('>I3', (score - math.floor(score)) * 1048576)
  redis.call('HSET', ids, idh, string.sub(address, 1, 7) .. r .. string.sub(address, 11))
  return 'moved'
end
redis.call('HDEL', ids, idh)
return 'removed'
