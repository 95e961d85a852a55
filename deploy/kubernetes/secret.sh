#!/bin/sh
# Prints the Secret `kvgate` with new passwords: once, for a new cluster.
#
#   deploy/kubernetes/secret.sh | kubectl create -f -
#
# Redis' users are those of deploy/redis/users.acl. docs/security.md explains what they may do.
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
END
sed -e "s/KVGATE_PASSWORD/$kvgate/; s/KVAGENT_PASSWORD/$kvagent/; s/KVCHUNK_PASSWORD/$kvchunk/; s/^/    /" \
  "$(dirname "$0")/../redis/users.acl"
