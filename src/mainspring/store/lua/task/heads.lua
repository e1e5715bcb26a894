-- Return entries of a slice with the payloads of the large ones left out: enough to order and to choose from.
--
-- KEYS  s:<slice>
-- ARGV  index of the first entry, limit, limit of bytes to read, '1' = large entries keep target, id and lane
-- returns {length of the list, entry ...}. An entry of more than 512 bytes is cut:
--   header:21 | c1 | its length:4 | body [target, empty payload, id, lane] if requested and readable
-- Reads at least one entry, if there is one. Writes nothing.
local key, at, most, left, content = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local stop = at + most - 1

local function number(row, from, bytes)
  local value = 0
  for i = from, from + bytes - 1 do value = value * 256 + (string.byte(row, i) or 0) end
  return value
end

-- Return where a msgpack string, binary or nil ends; nil for anything else.
local function behind(row, from)
  local kind = string.byte(row, from)
  if kind == 0xc0 then return from + 1 end
  if kind == 0xc4 or kind == 0xd9 then return from + 2 + number(row, from + 1, 1) end
  if kind == 0xc5 or kind == 0xda then return from + 3 + number(row, from + 1, 2) end
  if kind == 0xc6 or kind == 0xdb then return from + 5 + number(row, from + 1, 4) end
  if kind and kind >= 0xa0 and kind <= 0xbf then return from + 1 + kind - 0xa0 end
end

local function body_without_payload(row)
  local fields = (string.byte(row, 22) or 0) - 0x90
  if fields < 2 or fields > 15 then return '' end
  local payload = behind(row, 23)
  local id = payload and behind(row, payload)
  if not id then return '' end
  local lane = fields > 2 and behind(row, id) or id
  local rest = fields > 3 and behind(row, lane) or lane
  local id_bytes = lane > id and string.sub(row, id, lane - 1) or '\192'
  local lane_bytes = rest > lane and string.sub(row, lane, rest - 1) or '\192'
  return '\148' .. string.sub(row, 23, payload - 1) .. '\196\0' .. id_bytes .. lane_bytes
end

local out, step = {redis.call('LLEN', key)}, 1
while at <= stop and left > 0 do
  local rows = redis.call('LRANGE', key, at, math.min(stop, at + step - 1))
  if #rows == 0 then break end
  local bytes = 0
  for _, row in ipairs(rows) do
    bytes = bytes + #row
    if #row > 512 then
      row = string.sub(row, 1, 21) .. '\193' .. struct.pack('>I4', #row) .. (content and body_without_payload(row) or '')
    end
    out[#out + 1] = row
  end
  at, left = at + #rows, left - bytes
  -- Read pieces of about 64 kB, so that Lua holds little at a time, whatever the size of the entries.
  step = math.max(1, math.min(128, math.floor(65536 * #rows / math.max(1, bytes))))
end
return out
