-- Search the chains of a partition for those whose planned occurrence may be missing.
--
-- KEYS  next, ids
-- ARGV  cursor, how many to look at (about), ms for which an occurrence may be overdue before it is suspect
-- returns {next cursor, {name, next value ...} of the suspect chains}
-- An occurrence is in the index from when it is written until long after its end, unless it was cancelled.
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local before, found = math.floor(now_us() / 1000) - tonumber(ARGV[3]), {}
for i = 1, #page[2], 2 do
  local value = page[2][i + 1]
  local _, high, low = struct.unpack('>I4I4I4', value)
  local planned = high * 4294967296 + low
  if planned > 0 and (planned < before or redis.call('HEXISTS', KEYS[2], string.sub(value, 13, 28)) == 0) then
    found[#found + 1], found[#found + 2] = page[2][i], value
  end
end
return {page[1], found}
