-- A node as stored in `nodes`: "<order>:<nonce>:<lease in ms>:<1 when it is leaving>:<record>".
local function member(raw)
  if not raw then return nil end
  local order, nonce, lease, leaving, record = string.match(raw, '^(%d+):([^:]*):(%d+):([01]):(.*)$')
  if not order then return nil end
  return {order = tonumber(order), nonce = nonce, lease = tonumber(lease), leaving = leaving == '1', record = record}
end
