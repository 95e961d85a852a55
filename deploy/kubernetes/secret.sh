#!/bin/sh
# Prints the Secret `kvgate` with new passwords: once, for a new cluster.
#
#   deploy/kubernetes/secret.sh | kubectl create -f -
#
# What Redis' users may do is explained in docs/security.md.
set -eu

password() {
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

kvgate=$(password)
kvagent=$(password)
kvchunk=$(password)

cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: kvgate
  namespace: kvgate
stringData:
  KVGATE_REDIS_URL: redis://kvgate:$kvgate@redis:6379/0
  KVGATE_AGENT_REDIS_URL: redis://kvagent:$kvagent@redis:6379/0
  KVGATE_LMCACHE_URL: redis://kvchunk:$kvchunk@redis:6379/0
  KVGATE_CACHE_SALT_SECRET: $(password)
  users.acl: |
    user default on nopass -@all +ping
    user kvgate on >$kvgate ~kvgate:* %R~kvchunk@* -@all +ping +info +eval +evalsha +script|load +script|exists +time +exists +get +mget +strlen +set +del +unlink +incr +expire +hget +hmget +hgetall +hkeys +hset +hdel +hincrby +hlen +zadd +zrem +zcard +zrange +zrangebyscore +zscore +zmscore +zcount +zrevrange +zrandmember +hrandfield +sadd +smembers +rpush +lrange +ltrim +blmove +xadd +xread +xrevrange +dbsize +randomkey +pttl +memory|usage +subscribe resetchannels &__keyevent@0__:set &__keyevent@0__:evicted (~*@*@*@* +eval +evalsha +pttl +pexpire +memory|usage +object|idletime)
    user kvagent on >$kvagent ~kvgate:{*}:* ~kvgate:pools ~kvgate:tenants %R~kvchunk@* -@all +ping +info +eval +evalsha +script|load +script|exists +time +exists +get +mget +strlen +set +del +unlink +incr +expire +hget +hmget +hgetall +hkeys +hset +hdel +hincrby +hlen +zadd +zrem +zcard +zrange +zrangebyscore +zscore +zmscore +zcount +zrevrange +zrandmember +hrandfield +sadd +smembers +rpush +lrange +ltrim +blmove +xadd +xread +xrevrange
    user kvchunk on >$kvchunk ~kvchunk@* -@all +ping +info +get +set +exists
END
